"""integrity: a hand-over passes only if its blocks are what it says they are; audits the pools and reports."""

import triton_python_backend_utils as pb_utils

from tritone.backend import StageModel, complete_config
from tritone.errors import bad
from tritone.messages import Prefilled, report_tensors


class TritonPythonModel(StageModel):
    pb_utils = pb_utils
    stage = "integrity"

    @staticmethod
    def auto_complete_config(config):
        return complete_config(config, "integrity")

    def start(self, metrics):
        from tritone.deployment import Deployment, run_directory
        from tritone.pools.board import CancelBoard
        from tritone.stages.integrity import IntegrityStage

        directory = run_directory()
        self.work = IntegrityStage(Deployment.from_environment(), directory, CancelBoard(directory), metrics)

    def handle(self, tensors, request):
        if "report" in tensors:
            return report_tensors(self.work.report())
        if missing := {"session", "ids", "request", "handoff"} - set(tensors):
            raise bad("inputs", sorted(tensors), f"report alone, or a hand-over, which lacks {sorted(missing)}")
        return self.work.check(Prefilled.from_tensors(tensors), request.is_cancelled()).to_tensors()

    def shut_down(self):
        self.work.stop()
