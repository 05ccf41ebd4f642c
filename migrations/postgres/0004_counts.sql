-- Runs are counted from `runs_status` and `runs_aside` here: there is nothing to change.

SELECT 1;
