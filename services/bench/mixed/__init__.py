"""`trimtab bench mixed`: realtime and batch on one engine, under FCFS, vLLM's priority and our scheduler, switched live.

By noun: `arms` (who is compared, as policies), `workload` (seeded arrivals, lengths and prompts), `sources` (what sends), `engine` (the one
process that answers), `block` (one measurement), `figures`, `goals`, `tables`, `picture` (what is made of them), `check` (that our FCFS is
stock FCFS), `plan` and `course` (what runs, in which order), `traces` and `simulation` (the same question in virtual time).
"""
