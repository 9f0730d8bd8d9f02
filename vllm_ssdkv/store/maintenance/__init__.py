"""Work on whole stores: scrub, check, repair, list, remove."""
