"""A model's answer taken apart: its reasoning, its calls of tools, and what is for the reader."""
