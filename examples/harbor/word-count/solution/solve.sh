#!/bin/bash
cd /app/files
for name in *.txt; do
    echo "$name $(wc -w < "$name")"
done > /app/counts.txt
