"""talker: text events -> speech frames, clause by clause."""

import triton_python_backend_utils as pb_utils

from tritone.backend import StageModel, complete_config
from tritone.messages import Event


class TritonPythonModel(StageModel):
    pb_utils = pb_utils
    stage = "talker"

    @staticmethod
    def auto_complete_config(config):
        return complete_config(config, "talker")

    def start(self, metrics):
        from tritone.deployment import Deployment, run_directory
        from tritone.stages.build_speech import build_talker

        self.work = build_talker(Deployment.from_environment(), run_directory(), metrics, self.restarted)

    def handle(self, tensors, request):
        self.work.submit(Event.from_tensors(tensors), self.reply(request))

    def purge(self):
        self.work.purge()

    def shut_down(self):
        self.work.stop()
