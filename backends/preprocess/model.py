"""preprocess: messages and options -> token ids and media, or the text to speak."""

import triton_python_backend_utils as pb_utils

from tritone.backend import StageModel, complete_config
from tritone.messages import ROLE_OUTPUTS, read_bytes


class TritonPythonModel(StageModel):
    pb_utils = pb_utils
    stage = "preprocess"

    @staticmethod
    def auto_complete_config(config):
        return complete_config(config, "preprocess")

    def start(self, metrics):
        from tritone.deployment import Deployment
        from tritone.stages.intake import Intake
        from tritone.stages.preprocess import PreprocessStage

        deployment = Deployment.from_environment()
        stage = PreprocessStage(deployment)
        media = PreprocessStage(deployment) if stage.takes_media else None
        self.work = Intake(stage, metrics, deployment.max_wait_seconds, media)

    def handle(self, tensors, request):
        asked = [name for name in request.requested_output_names() if name in ROLE_OUTPUTS]
        raw = read_bytes(tensors, "messages")
        self.work.submit(ROLE_OUTPUTS[asked[0]], raw, self.parameters(request), self.reply(request))

    def shut_down(self):
        self.work.stop()
