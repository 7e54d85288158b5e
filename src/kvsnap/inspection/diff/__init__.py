"""Two caches compared: what differs, where, and by how much."""
