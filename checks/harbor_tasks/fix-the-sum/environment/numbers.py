from pathlib import Path

total = 0
for line in Path("numbers.txt").read_text().split():
    total = int(line)
print(total)
