"""Tickets for use elsewhere: files of their own size, ONNX."""

from suptickets.deploy.compact import load_compact, save_compact
from suptickets.deploy.onnx import save_onnx

__all__ = ["load_compact", "save_compact", "save_onnx"]
