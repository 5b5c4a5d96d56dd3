"""Pipeline parallelism: schedules and partition (pure), and the runtime that executes a rank's list."""
