"""Writes the golden packets and the document's copy of them anew; look at what has changed."""

from __future__ import annotations

import json

from tests.golden import PACKETS, rewrite_document
from tests.golden.examples import render

packets = render()
PACKETS.write_text(json.dumps(packets, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
rewrite_document(packets)
