"""The lab of clusters: traces of real engines, and methods of choosing, placing and caching pages.

Engine-free but for :mod:`.record`. Conventions: pages of 16 tokens; the first page and the window
(newest 256 tokens) are always attended to and never counted; a budget b is b of the other pages.
"""
