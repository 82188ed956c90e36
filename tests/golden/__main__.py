"""Writes the golden packets anew; look at what has changed."""

from __future__ import annotations

import json

from tests.golden import PACKETS
from tests.golden.examples import render

PACKETS.write_text(json.dumps(render(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
