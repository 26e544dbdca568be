"""Starts and stops a Triton server for one deployment: backend directory, run directory, child process, readiness."""

from tritone.supervisor.resolve import resolve_deployment
from tritone.supervisor.server import Server, StartError

__all__ = ["Server", "StartError", "resolve_deployment"]
