#!/bin/bash
# Half of the reward for each line that is right.
right=0
while read -r name count; do
    if grep -qx "$name $count" "$EXPECTED"; then right=$((right + 1)); fi
done < /tests/expected.txt
case $right in
    2) reward=1 ;;
    1) reward=0.5 ;;
    *) reward=0 ;;
esac
echo "$right of 2 lines are right"
echo $reward > /logs/verifier/reward.txt
