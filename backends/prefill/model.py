"""prefill: token ids -> the first token, and the prompt's KV as leased blocks."""

import os

import triton_python_backend_utils as pb_utils

from tritone.backend import StageModel, complete_config
from tritone.messages import GenerateRequest

NICE = 3
"""Where prefill and decode share cores, running answers get about two thirds of them: a late token is seen at once, a prompt
that takes a little longer is not. Threads made later inherit it."""


class TritonPythonModel(StageModel):
    pb_utils = pb_utils
    stage = "prefill"

    @staticmethod
    def auto_complete_config(config):
        return complete_config(config, "prefill")

    def start(self, metrics):
        from tritone.deployment import Deployment, run_directory
        from tritone.stages.build import build_prefill

        os.nice(NICE)
        self.work = build_prefill(Deployment.from_environment(), run_directory(), metrics)

    def handle(self, tensors, request):
        self.work.submit(GenerateRequest.from_tensors(tensors), self.reply(request))

    def shut_down(self):
        self.work.stop()
