"""postprocess: events -> the client's responses, numbered; sees cancelled clients."""

import triton_python_backend_utils as pb_utils

from tritone.backend import StageModel, complete_config
from tritone.messages import Event


class TritonPythonModel(StageModel):
    pb_utils = pb_utils
    stage = "postprocess"

    @staticmethod
    def auto_complete_config(config):
        return complete_config(config, "postprocess")

    def start(self, metrics):
        from tritone.deployment import run_directory
        from tritone.pools import CancelBoard, Views
        from tritone.stages.postprocess import PostprocessStage

        directory = run_directory()
        self.work = PostprocessStage(CancelBoard(directory), Views(directory), metrics, restarted=self.restarted)

    def handle(self, tensors, request):
        self.work.submit(Event.from_tensors(tensors), self.reply(request))

    def purge(self):
        self.work.purge()
