#!/bin/bash
printf "4\n9\n" > numbers.txt
if [ "$(python3 numbers.py)" = 13 ]; then echo '{"reward": 1, "runs": 1}'; else echo '{"reward": 0, "runs": 1}'; fi > /logs/verifier/reward.json
