"""What shows a running engine: Grafana dashboards, alert rules for Prometheus, and their renderer.

``python -P -m vllm_ssdkv.grafana.write DIR`` writes the dashboards' JSON. It needs
grafana-foundation-sdk; nothing else here does.
"""
