//! Edits of JSON, so that most inputs are still JSON and reach what reads it.

use fastrand::Rng;
use libfuzzer_sys::fuzzer_mutate;
use serde_json::{Number, Value, json};

/// Numbers at which sizes and offsets go wrong.
const NUMBERS: [i64; 20] = [
    0,
    1,
    2,
    3,
    4,
    8,
    16,
    31,
    64,
    255,
    4096,
    -1,
    -2,
    1 << 31,
    1 << 32,
    1 << 40,
    1 << 62,
    i64::MAX - 1,
    i64::MAX,
    i64::MIN,
];

/// A mutator for `fuzz_mutator!`: an edit of the JSON behind the first `head` bytes, or of bytes
/// where there is none, and now and then anyway. Gives the new size.
pub fn mutate(data: &mut [u8], size: usize, max_size: usize, seed: u32, head: usize) -> usize {
    let mut rng = Rng::with_seed(u64::from(seed));
    let text = data.get(head..size).unwrap_or_default();
    if rng.u8(..8) > 0
        && let Ok(mut value) = serde_json::from_slice::<Value>(text)
    {
        for _ in 0..rng.usize(1..4) {
            edit(&mut value, &mut rng);
        }
        let text = value.to_string();
        if head + text.len() <= max_size {
            data[head..head + text.len()].copy_from_slice(text.as_bytes());
            return head + text.len();
        }
    }
    fuzzer_mutate(data, size, max_size)
}

/// One edit somewhere in a document.
fn edit(root: &mut Value, rng: &mut Rng) {
    let count = count(root);
    let donor = at(root, &mut rng.usize(..count)).map_or(Value::Null, |value| value.clone());
    let Some(place) = at(root, &mut rng.usize(..count)) else { return };
    match (rng.u8(..6), place) {
        (0, Value::Array(list)) if !list.is_empty() => drop(list.remove(rng.usize(..list.len()))),
        (0, Value::Object(map)) if !map.is_empty() => {
            let key = map.keys().nth(rng.usize(..map.len())).cloned().unwrap_or_default();
            let value = map.remove(&key);
            if rng.bool() {
                map.insert(mutated_text(&key, rng), value.unwrap_or_default());
            }
        }
        (1, Value::Array(list)) => list.insert(rng.usize(..=list.len()), donor),
        (1, Value::Object(map)) if !map.is_empty() => {
            let index = rng.usize(..map.len());
            if let Some(value) = map.values_mut().nth(index) {
                *value = donor;
            }
        }
        (_, Value::Number(number)) => *number = mutated_number(number, rng),
        (2, Value::String(text)) => *text = mutated_text(text, rng),
        (_, Value::Bool(flag)) => *flag = !*flag,
        (3 | 4, place @ (Value::String(_) | Value::Null)) => *place = donor,
        (5, place) => *place = json!([]),
        _ => {}
    }
}

fn mutated_number(number: &Number, rng: &mut Rng) -> Number {
    let whole = number.as_i64();
    match (rng.u8(..4), whole) {
        (0, Some(whole)) => whole.wrapping_add(rng.i64(-2..=2)).into(),
        (1, Some(whole)) => whole.wrapping_mul(rng.i64(-2..=4)).into(),
        (2, _) => Number::from_f64(rng.f64() * 2.0 - 0.5).unwrap_or_else(|| 0.into()),
        _ => NUMBERS[rng.usize(..NUMBERS.len())].into(),
    }
}

fn mutated_text(text: &str, rng: &mut Rng) -> String {
    let mut letters: Vec<char> = text.chars().collect();
    match (rng.u8(..3), letters.len()) {
        (0, length @ 1..) => drop(letters.remove(rng.usize(..length))),
        (1, length @ 1..) => letters[rng.usize(..length)] = rng.char(' '..='~'),
        (_, length) => letters.insert(rng.usize(..=length), rng.char(' '..='~')),
    }
    letters.into_iter().collect()
}

fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(list) => list.iter().map(count).sum(),
        Value::Object(map) => map.values().map(count).sum(),
        _ => 0,
    }
}

/// The value that `left` others come before.
fn at<'v>(value: &'v mut Value, left: &mut usize) -> Option<&'v mut Value> {
    if *left == 0 {
        return Some(value);
    }
    *left -= 1;
    match value {
        Value::Array(list) => list.iter_mut().find_map(|value| at(value, left)),
        Value::Object(map) => map.values_mut().find_map(|value| at(value, left)),
        _ => None,
    }
}
