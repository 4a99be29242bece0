//! Conversations by templates of both kinds.

use minijinja::Value;
use serde_json::json;

use super::super::records::{Fields, Record};
use super::template::Template;
use super::*;

const CHATML: &str = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + \
    message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}\
    {{ '<|im_start|>assistant\n' }}{% endif %}";

const MARKED: &str = "{{ bos_token }}{%- for message in messages %}\n{%- if message.role == \
    'assistant' %}\n<a>{% generation %}\n{{ message.content }}{{ eos_token }}{% endgeneration %}\n\
    {%- else %}\n<u>{{ message.content }}\n{%- endif %}\n{%- endfor %}";

const LLAMA_2: &str = "{% for message in messages %}{% if message['role'] == 'user' %}\
    {{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}{% elif \
    message['role'] == 'assistant' %}{{ ' ' + message['content'].strip() + ' ' + eos_token \
    }}{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}\
    {% endif %}{% endfor %}";

/// Hides what was answered before, as templates of models that think do.
const FORGETFUL: &str = "{% for message in messages %}{% if message.role == 'assistant' and not \
    loop.last %}<a>...{% else %}<{{ message.role[:1] }}>{{ message.content }}{% endif %}\
    {% endfor %}{% if add_generation_prompt %}<a>{% endif %}";

fn value(json: &serde_json::Value) -> Value {
    serde_json::from_str(&json.to_string()).unwrap()
}

fn conversation(turns: &[(&str, &str)]) -> Conversation {
    let messages: Vec<_> =
        turns.iter().map(|(role, content)| json!({"role": role, "content": content})).collect();
    let record = value(&json!({ "messages": messages }));
    let record = Fields::default().record(&record, "line 1", Path::new("a.jsonl")).unwrap();
    match record {
        Some(Record::Chat(chat)) => *chat,
        other => panic!("{other:?}"),
    }
}

#[test]
fn answers_are_what_the_template_marks_or_what_prefixes_leave() {
    let config = value(&json!({"bos_token": "<s>", "eos_token": {"content": "</s>"}}));
    let check =
        |template: &str, turns: &[(&str, &str)], expected: Result<(&str, &[&str]), &str>| {
            let template = Template::new(template, &config).unwrap();
            let got = template.answers(&conversation(turns));
            match expected {
                Ok((text, answers)) => {
                    let (rendered, spans) = got.unwrap();
                    assert_eq!(rendered, text);
                    let spans: Vec<&str> = spans.into_iter().map(|span| &rendered[span]).collect();
                    assert_eq!(spans, answers);
                }
                Err(part) => {
                    let error = got.unwrap_err();
                    assert!(error.contains(part), "{error}");
                }
            }
        };
    let two = [("user", "q"), ("assistant", "a"), ("user", " r "), ("assistant", "b")];
    check(
        CHATML,
        &two[..2],
        Ok((
            "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n",
            &["a<|im_end|>\n"],
        )),
    );
    check(MARKED, &two, Ok(("<s><u>q<a>a</s><u> r <a>b</s>", &["a</s>", "b</s>"])));
    check(
        LLAMA_2,
        &two,
        Ok(("<s>[INST] q [/INST] a </s><s>[INST] r [/INST] b </s>", &[" a </s>", " b </s>"])),
    );
    check(LLAMA_2, &[("system", "x"), ("assistant", "a")], Err("Only user and assistant roles"));
    check(FORGETFUL, &two[..2], Ok(("<u>q<a>a", &["a"])));
    check(FORGETFUL, &two, Err("renders what is before message 2 differently"));
    check(CHATML, &two[..1], Err("expected a message of the role `assistant`, got none"));
    check(MARKED, &[("assistant", "a\u{fdd0}")], Err("within each other"));
}

#[test]
fn a_token_counts_with_any_part_of_an_answer() {
    let answers = [3..6, 9..10];
    for (token, expected) in [
        ((0, 3), false),
        ((2, 4), true),
        ((5, 9), true),
        ((6, 9), false),
        ((3, 3), false),
        ((4, 4), true),
        ((9, 12), true),
    ] {
        assert_eq!(counts(token, &answers), expected, "{token:?}");
    }
}

#[test]
fn a_folder_without_a_template_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    let error = Template::beside(&path).unwrap_err().to_string();
    assert!(error.contains("has no chat template"), "{error}");
    let config = json!({"chat_template": [{"name": "rag", "template": "x"},
        {"name": "default", "template": "y{{ bos_token }}"}], "bos_token": "<s>"});
    std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let first = Template::beside(&path).unwrap();
    assert_eq!(first.answers(&conversation(&[("assistant", "a")])).unwrap().0, "y<s>");
    std::fs::write(folder.path().join("chat_template.jinja"), "z").unwrap();
    let second = Template::beside(&path).unwrap();
    assert_ne!(first.hash(), second.hash());
    std::fs::write(folder.path().join("chat_template.jinja"), "{% if").unwrap();
    let error = Template::beside(&path).unwrap_err().to_string();
    assert!(error.contains("chat_template.jinja"), "{error}");
}
