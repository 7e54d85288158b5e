"""File formats: the native one, and later the foreign ones. Each turns files into snapshots and back."""
