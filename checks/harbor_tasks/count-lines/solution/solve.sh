#!/bin/bash
grep -c ERROR /app/access.log > /app/count.txt
