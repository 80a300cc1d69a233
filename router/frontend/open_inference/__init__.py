"""The Open Inference Protocol as clients of Triton speak it: a translation to the generator."""
