"""Attention near storage: devices that attend to contexts where these lie."""
