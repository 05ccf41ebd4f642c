-- Runs are counted from `runs_status` and `runs_aside` here, and what is armed is read whole: there is nothing to change.

SELECT 1;
