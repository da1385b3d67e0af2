"""Requests on files of drives: the contract of an engine, the native one, and its buffers.

Owns tickets of requests, priorities, aligned memory and the wording of storage errors. Imported by
everything that touches files. Never knows what the bytes mean, nor that files are striped.
"""
