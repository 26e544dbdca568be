"""decode: hand-overs -> text events, and hidden states for the Talker as references."""

import triton_python_backend_utils as pb_utils

from tritone.backend import StageModel, complete_config
from tritone.messages import Prefilled


class TritonPythonModel(StageModel):
    pb_utils = pb_utils
    stage = "decode"

    @staticmethod
    def auto_complete_config(config):
        return complete_config(config, "decode")

    def start(self, metrics):
        from tritone.deployment import Deployment, run_directory
        from tritone.stages.build import build_decode

        self.work = build_decode(Deployment.from_environment(), run_directory(), metrics)

    def handle(self, tensors, request):
        self.work.submit(Prefilled.from_tensors(tensors), self.reply(request))

    def purge(self):
        self.work.purge()

    def shut_down(self):
        self.work.stop()
