#!/bin/sh
# Checks Unicorn's kernels on this machine's GPU, measures them and models with random weights, and writes one JSON
# file.
#
#   ./run.sh                      the best GPU; about a quarter of an hour, 20 GB of disk, 24 GB of memory for the largest model
#   ./run.sh --device NAME|INDEX  another one (`work/unicorn devices` lists them)
#   ./run.sh --no-27b             without the 27B: 3 GB of disk
#   ./run.sh --small              tiny sizes, to try the script; with --allow-software-vulkan on a machine without a GPU
#   ./run.sh --work FOLDER        where to unpack and to write models, which are removed afterwards [work]
#   ./run.sh --output FILE        the JSON [result.json]
#
# The script needs a Vulkan loader, a driver, xz, and the usual tools of a Linux system. It sends nothing over the network.
set -u
here=$(cd "$(dirname "$0")" && pwd)
work=$here/work output=$here/result.json
device='' small=0 with_27b=1 software=0
while [ $# -gt 0 ]; do
    case $1 in
        --device) device=${2:?--device needs a name or an index}; shift ;;
        --work) work=${2:?--work needs a folder}; shift ;;
        --output) output=${2:?--output needs a file}; shift ;;
        --no-27b) with_27b=0 ;;
        --small) small=1 ;;
        --allow-software-vulkan) software=1 ;;
        -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) echo "error: unknown option $1; see $0 --help" >&2; exit 2 ;;
    esac
    shift
done

# Time limits in seconds: for one command, and for all work before a model starts.
most=${GPU_BENCH_MOST_S:-300} budget=${GPU_BENCH_BUDGET_S:-840}
began=$(date +%s)
commit=$(cat "$here/commit")
# The user's settings and folders must not affect the measurement.
for name in $(env | sed -n 's/^\(UNICORN_[A-Za-z0-9_]*\)=.*/\1/p'); do unset "$name"; done
mkdir -p "$work" || exit 1
work=$(cd "$work" && pwd)
export UNICORN_CACHE_DIR="$work/cache" UNICORN_COMMIT="$commit" UNICORN_TEST_ROOT="$work/tree" UNICORN_TEST_VALIDATION=0
[ -z "$device" ] || export UNICORN_TEST_DEVICE="$device" UNICORN_HARDWARE_DEVICE="$device"
[ "$software" = 0 ] || export UNICORN_HARDWARE_ALLOW_SOFTWARE_VULKAN=true
trap 'rm -rf "$work/4b" "$work/27b"' EXIT
trap 'exit 130' INT TERM

say() { printf '%s %s\n' "$(date +%H:%M:%S)" "$*" >&2; }
# Prints a text as a JSON string.
quoted() { printf '"%s"' "$(printf '%s' "$1" | tr '\n\t' '  ' | tr -d '\000-\037' | sed 's/[\\"]/\\&/g')"; }
list() { printf '[%s]' "$(printf '%s\n' "$1" | sed '/^$/d' | while IFS= read -r line; do quoted "$line"; printf ','; done | sed 's/,$//')"; }
problems=
problem() { say "PROBLEM: $*"; problems="$problems$*
"; }
bounded() { if command -v timeout >/dev/null; then timeout -k 10 "$most" "$@"; else "$@"; fi; }
# `measure NAME COMMAND...` writes the command's JSON to $work/NAME.json, or null, and notes the problem.
measure() {
    name=$1
    shift
    say "$name: unicorn-lab $*"
    bounded "$work/unicorn-lab" "$@" --json >"$work/$name.json" 2>"$work/$name.log"
    status=$?
    if [ $status != 0 ] || [ ! -s "$work/$name.json" ]; then
        problem "$name: exit code $status: $(tail -n 1 "$work/$name.log")"
        echo null >"$work/$name.json"
    fi
}

say "unpacking into $work"
if ! command -v xz >/dev/null; then
    echo "error: xz is not installed (xz-utils)" >&2
    exit 1
fi
xz -dc "$here/all.tar.xz" | tar -xf - -C "$work" && ln -sf ../unicorn "$work/tree/unicorn" || exit 1

if ! devices=$("$work/unicorn" devices 2>&1); then
    printf '%s\n' "$devices" >&2
    echo "error: no Vulkan device can be listed; is a loader installed (libvulkan1), and a driver?" >&2
    exit 1
fi

passed=0 failed=0 failures=
# `check NAME FILTER...` runs tests of the suite.
check() {
    name=$1
    shift
    say "checking $name"
    log=$work/suite-$name.log
    bounded "$work/suite" "$@" --skip validation_is_loaded >"$log" 2>&1
    status=$?
    # The result lines of the tests are counted, because a killed suite prints no summary.
    passed=$((passed + $(grep -c '^test .* \.\.\. ok$' "$log")))
    failed=$((failed + $(grep -c '^test .* \.\.\. FAILED$' "$log")))
    failures="$failures$(sed -n 's/^test \(.*\) \.\.\. FAILED$/\1/p' "$log")
"
    grep -q '^test result: ' "$log" ||
        problem "checks of $name: did not finish, exit code $status (124: after $most s): $(tail -n 1 "$log")"
}
# Models first: drivers may need minutes to compile the kernels of every scheme. On a CPU, most of these checks take many
# minutes.
if [ "$small" = 1 ]; then
    check models model::golden::
    check kernels kernels::twins::rms_norm kernels::twins::qkv_store kernels::twins::moments
else
    check models model::golden:: model::self_test:: model::demo:: engine::batching::
    check kernels kernels::twins:: kernels::fast:: in_any_order_between_barriers
fi
say "checked: $passed passed, $failed failed"
printf '%s' "$failures" | sed '/^$/d' >&2

if [ "$small" = 1 ]; then
    measure kernels kernels --shape gemma-3-270m --scheme int4-g32 --tokens 1 --depth 64 --runs 1
else
    measure kernels kernels --scheme int4-g32,int4-g128,int8-row --tokens 1,8,128 --runs 3 --budget-s $((most * 2 / 3))
fi

# `model NAME GB SHAPE SCHEME` writes a model, measures it, and removes it.
model() {
    name=$1 gb=$2 shape=$3 scheme=$4
    echo null >"$work/$name.json"
    free=$(df -Pk "$work" | awk 'NR == 2 { print int($4 / 1000000) }')
    if [ $(($(date +%s) - began)) -ge "$budget" ]; then
        problem "$name: skipped: the work before took longer than $budget s"
    elif [ "${free:-0}" -lt "$gb" ]; then
        problem "$name: skipped: $work has $free GB free, and it needs $gb"
    elif ! bounded "$work/unicorn-lab" synth --shape "$shape" --scheme "$scheme" "$work/$name" >"$work/$name.log" 2>&1; then
        problem "$name: cannot be written: $(tail -n 1 "$work/$name.log")"
    elif [ "$small" = 1 ]; then
        measure "$name" model --model "$work/$name" --prefill 8 --depth 0 --batch 1,2 --steps 1 --runs 1 --limit-s 10 --context 64
    else
        measure "$name" model --model "$work/$name" --prefill 128,512,2048 --depth 0,2048,8192 --batch 1,4,16,64 \
            --steps 4 --runs 1 --limit-s 15 --budget-s 120
    fi
    rm -rf "${work:?}/$name"
}
if [ "$small" = 1 ]; then
    model 4b 1 gemma-3-270m int4-g32
    echo null >"$work/27b.json"
else
    model 4b 4 gemma-3-4b int4-g32
    if [ "$with_27b" = 1 ]; then model 27b 18 gemma-3-27b int4-g128; else echo null >"$work/27b.json"; fi
fi

cpu=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)
memory=$(sed -n 's/^MemTotal: *\([0-9]*\) kB/\1/p' /proc/meminfo)
{
    printf '{"benchmark": "gpu-bench", "commit": %s, "date": %s, ' "$(quoted "$commit")" "$(quoted "$(date -u +%Y-%m-%dT%H:%M:%SZ)")"
    printf '"seconds": %s, "small": %s, ' $(($(date +%s) - began)) "$([ "$small" = 1 ] && echo true || echo false)"
    printf '"kernel": %s, "cpu": %s, "memory_kib": %s, ' "$(quoted "$(uname -srm)")" "$(quoted "$cpu")" "${memory:-null}"
    printf '"devices": %s, ' "$(list "$devices")"
    printf '"checks": {"passed": %s, "failed": %s, "failures": %s}, ' "$passed" "$failed" "$(list "$failures")"
    printf '"problems": %s, ' "$(list "$problems")"
    printf '"kernels": '; cat "$work/kernels.json"
    printf ', "gemma-3-4b": '; cat "$work/4b.json"
    printf ', "gemma-3-27b": '; cat "$work/27b.json"
    printf '}\n'
} >"$output"
say "written: $output, after $(($(date +%s) - began)) s; logs in $work"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ] && [ -z "$problems" ]
