"""Several SSDs on one machine: virtual ones on FUSE, throttled RAM disks, RAID-0 over either.

``python -P -m vllm_ssdkv.profiling.vssd up 8`` makes eight directories that behave like eight
drives; ``down`` removes them, also what a killed process left. Both kinds need root; without it
``ssdkv lab bench io --emulate N`` slows devices down inside our own engines.

*Virtual SSDs* (``fuse``) have a model of bandwidth, latency and IOPS each, in dilated time, and
take faults: lines written to the file ``control`` beside the directories, e.g. ``3 stall 500``.
Making, renaming and removing files costs no time in the model. They serve about 80 thousand I/Os
per second in all. *Throttled RAM disks* (``loop``) are loop devices with ext4 and block-layer
limits: faster, but without latency, and requests above 512 KiB are charged twice.
"""
