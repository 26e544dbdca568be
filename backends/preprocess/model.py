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
        from tritone.stages.preprocess import PreprocessStage

        self.work = PreprocessStage(Deployment.from_environment())

    def handle(self, tensors, request):
        asked = [name for name in request.requested_output_names() if name in ROLE_OUTPUTS]
        role = ROLE_OUTPUTS[asked[0]]
        raw = read_bytes(tensors, "messages")
        parameters = self.parameters(request)
        if role == "speech":
            made = self.work.speech(raw, parameters).to_tensors()
            return {"session": made["session"], "speech_event": made["event"]}
        made = self.work.generate(raw, parameters, role)
        tensors = made.to_tensors()
        return {
            "session": tensors["session"],
            "ids": tensors["ids"],
            asked[0]: tensors["request"],
            "media": made.media_tensor(),
        }
