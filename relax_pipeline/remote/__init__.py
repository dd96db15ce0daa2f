"""Ray: where processes live and how they are called. The only package that imports ray."""

from __future__ import annotations

import os

# Read when Ray is imported. Otherwise a call that comes late, from a thread that generates while the run is being
# closed, starts a whole new Ray that nobody stops; and when that one's server is gone, Ray ends this process.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
