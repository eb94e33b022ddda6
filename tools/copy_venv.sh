#!/bin/sh
# Copy a virtual environment, which takes seconds where installing the same again takes most of a minute: copy_venv.sh FROM TO
set -eu
from=$1
to=$2

rm -rf "$to"
cp -a "$from" "$to"
rm -f "$to/installed" "$to/installed-dev"
# Scripts name the interpreter that they start.
old=$(cd "$from" && pwd -P)
new=$(cd "$to" && pwd -P)
for file in "$to"/bin/* "$to/pyvenv.cfg"; do
    if [ -f "$file" ] && [ ! -L "$file" ] && grep -qI "$old" "$file"; then
        sed -i "s#$old\([/\"' ]\|\$\)#$new\1#g" "$file"
    fi
done
