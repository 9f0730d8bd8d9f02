"""Protocol between engines and nodes: addresses, frames, messages, channels, keys."""
