"""Policies that other programs own: plugins, ONNX files, servers."""
