"""`trimtab bench loops`: one mesh with a real engine, the same load with the loops on and off, under our scheduler and under FCFS."""
