"""talker of the cascade without overlap; see perf/omni/without_overlap.py."""

import sys
from pathlib import Path

# A stage finds no package of the checkout but those that are served.
sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from perf.omni import without_overlap


class TritonPythonModel(without_overlap.shipped("talker")):
    def start(self, metrics):
        without_overlap.make_talker_wait()
        super().start(metrics)
