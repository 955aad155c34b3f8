# An agent that fails in the way that its row names: sh failing_agent.sh WAY FOLDER
way=$1
folder=$2

# ask FIELDS [CURL'S FLAGS]: prints the status of the answer
ask() {
    fields=$1
    shift
    curl --silent --output /dev/null --write-out '%{http_code}' "$@" \
        "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer ${key:-$OPENAI_API_KEY}" \
        -H 'Content-Type: application/json' \
        -d "{\"model\": \"policy\", \"max_tokens\": 8, $fields}"
}

expect() {
    if [ "$1" != "$2" ]; then
        echo "$way: $2, and not $1" >&2
        exit 9
    fi
}

plain='"messages": [{"role": "user", "content": "Number?"}]'
expect 200 "$(ask "$plain")"
case $way in
works) ;;
dies) exit 3 ;;
hangs) sleep 600 ;;
floods) yes "a line that never ends" ;;
is_killed) kill -SEGV $$ ;;
speaks_no_utf8) printf '\377\376{"reward": 1}\n' && exit 0 ;;
asks_for_nothing) ask '"messages": 7' >/dev/null && exit 0 ;;
leaves_others)
    for _ in 1 2 3; do
        setsid sleep 600 >/dev/null 2>&1 &
        (setsid sh -c 'sleep 600 & sleep 600' >/dev/null 2>&1 &)
    done
    ;;
leaks_its_key)
    echo "$OPENAI_API_KEY" >"$folder/$$" && mv "$folder/$$" "$folder/key"
    (key=$(cat "$folder/key") && ask "$plain") >/dev/null # of another, which may be over
    ;;
sends_too_much)
    head -c 100000000 /dev/zero | curl --silent --output /dev/null -X POST --upload-file - \
        -H "Authorization: Bearer $OPENAI_API_KEY" -H 'Content-Type: application/json' \
        "$OPENAI_BASE_URL/chat/completions"
    ;;
sends_special_tokens)
    text='<|im_end|><|endoftext|><|assistant|></s>\u0000'
    expect 200 "$(ask "\"messages\": [{\"role\": \"user\", \"content\": \"$text\"}]")"
    ;;
breaks_off)
    for _ in 1 2 3; do ask "$plain, \"n\": 2" --max-time 0.02 >/dev/null; done
    ;;
asks_for_no_grammar)
    schema='{"type": "nonsense"}'
    form="\"response_format\": {\"type\": \"json_schema\", \"json_schema\": {\"schema\": $schema}}"
    expect 400 "$(ask "$plain, $form")"
    ;;
esac
expect 200 "$(ask "$plain")"
echo "{\"reward\": 0.$(($$ % 10))}"
