"""What a process tells about itself: traces, metrics, logs, all by one enum of stages."""
