//! The part of the protocol-buffer wire format that TensorBoard's scalar events need.
//!
//! A message is a sequence of fields; a field is a tag, `number << 3 | wire type`, and a value: a
//! varint (type 0), 8 bytes (type 1), a length and that many bytes (type 2), or 4 bytes (type 5).
//! All little endian.

/// Appends a base-128 varint.
pub(crate) fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Appends an integer field.
pub(crate) fn put_u64(out: &mut Vec<u8>, field: u64, value: u64) {
    put_varint(out, field << 3);
    put_varint(out, value);
}

/// Appends a double field.
pub(crate) fn put_f64(out: &mut Vec<u8>, field: u64, value: f64) {
    put_varint(out, field << 3 | 1);
    out.extend_from_slice(&value.to_le_bytes());
}

/// Appends a float field.
pub(crate) fn put_f32(out: &mut Vec<u8>, field: u64, value: f32) {
    put_varint(out, field << 3 | 5);
    out.extend_from_slice(&value.to_le_bytes());
}

/// Appends a string, bytes or message field.
pub(crate) fn put_bytes(out: &mut Vec<u8>, field: u64, value: &[u8]) {
    put_varint(out, field << 3 | 2);
    put_varint(out, value.len() as u64);
    out.extend_from_slice(value);
}

/// The value of a field.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Value<'a> {
    Varint(u64),
    F64(f64),
    Bytes(&'a [u8]),
    F32(f32),
}

/// Removes the next field from a message and returns it; `None` if the message is damaged.
pub(crate) fn take_field<'a>(message: &mut &'a [u8]) -> Option<(u64, Value<'a>)> {
    let tag = take_varint(message)?;
    let value = match tag & 7 {
        0 => Value::Varint(take_varint(message)?),
        1 => Value::F64(f64::from_le_bytes(take_array(message)?)),
        2 => {
            let length = usize::try_from(take_varint(message)?).ok()?;
            let (value, rest) = message.split_at_checked(length)?;
            *message = rest;
            Value::Bytes(value)
        }
        5 => Value::F32(f32::from_le_bytes(take_array(message)?)),
        _ => return None,
    };
    Some((tag >> 3, value))
}

fn take_array<const N: usize>(message: &mut &[u8]) -> Option<[u8; N]> {
    let (value, rest) = message.split_first_chunk::<N>()?;
    *message = rest;
    Some(*value)
}

fn take_varint(message: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = message.split_first()?;
        *message = rest;
        let bits = u64::from(byte & 0x7f);
        // The tenth byte has room for one bit.
        if shift == 63 && bits > 1 {
            return None;
        }
        value |= bits << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn varints() {
        for (value, bytes) in [
            (0u64, &[0u8][..]),
            (127, &[127]),
            (128, &[0x80, 1]),
            (300, &[0xac, 2]),
            (u64::MAX, &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]),
        ] {
            let mut out = Vec::new();
            put_varint(&mut out, value);
            assert_eq!(out, bytes);
            assert_eq!(take_varint(&mut &out[..]), Some(value));
            assert_eq!(take_varint(&mut &out[..out.len() - 1]), None);
        }
        assert_eq!(take_varint(&mut &[0xff; 11][..]), None);
        assert_eq!(take_varint(&mut &[0xff, 255, 255, 255, 255, 255, 255, 255, 255, 2][..]), None);
    }

    #[test]
    fn fields_come_back_in_order() {
        let mut message = Vec::new();
        put_u64(&mut message, 2, 300);
        put_f64(&mut message, 1, -0.5);
        put_bytes(&mut message, 16, b"well");
        put_f32(&mut message, 3, 1.5);
        let mut rest = &message[..];
        let mut fields = Vec::new();
        while !rest.is_empty() {
            fields.push(take_field(&mut rest).unwrap());
        }
        let expected = [
            (2, Value::Varint(300)),
            (1, Value::F64(-0.5)),
            (16, Value::Bytes(b"well")),
            (3, Value::F32(1.5)),
        ];
        assert_eq!(fields, expected);
        assert_eq!(take_field(&mut &[0x0a, 5, 1][..]), None);
        assert_eq!(take_field(&mut &[0x0b][..]), None);
    }
}
