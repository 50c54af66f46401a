//! Properties and headers as they are on the wire.
//!
//! Names and values are bytes; names may repeat; order is kept. Nesting is followed to a bound
//! and skipped below it, so that no message decides how deep the stack gets. What is malformed
//! ends the decoding where it is: what came before it counts.

use bytes::{Buf, Bytes};

/// Nested tables and arrays are read this deep.
pub(crate) const DEPTH_MAX: usize = 32;

pub(crate) const CONTENT_TYPE: u16 = 1 << 15;
pub(crate) const CONTENT_ENCODING: u16 = 1 << 14;
pub(crate) const HEADERS: u16 = 1 << 13;
pub(crate) const DELIVERY_MODE: u16 = 1 << 12;
const PRIORITY: u16 = 1 << 11;
pub(crate) const CORRELATION_ID: u16 = 1 << 10;
const REPLY_TO: u16 = 1 << 9;
const EXPIRATION: u16 = 1 << 8;
pub(crate) const MESSAGE_ID: u16 = 1 << 7;
const TIMESTAMP: u16 = 1 << 6;
pub(crate) const TYPE: u16 = 1 << 5;
const USER_ID: u16 = 1 << 4;
pub(crate) const APP_ID: u16 = 1 << 3;
const MORE_FLAGS: u16 = 1;

/// The bytes are not what AMQP says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Malformed;

/// A header's value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    Void,
    Bool(bool),
    /// Every width, signed or not.
    Integer(i64),
    Float(f32),
    Double(f64),
    Decimal {
        scale: u8,
        value: u32,
    },
    /// Long strings and byte arrays.
    Bytes(Bytes),
    /// Seconds since 1970.
    Timestamp(u64),
    Array(Vec<Value>),
    Table(Vec<(Bytes, Value)>),
    /// An array or table below [`DEPTH_MAX`].
    TooDeep,
}

/// The properties that mean something here.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Properties {
    pub(crate) content_type: Option<Bytes>,
    pub(crate) content_encoding: Option<Bytes>,
    pub(crate) headers: Vec<(Bytes, Value)>,
    pub(crate) correlation_id: Option<Bytes>,
    pub(crate) message_id: Option<Bytes>,
    pub(crate) kind: Option<Bytes>,
    pub(crate) app_id: Option<Bytes>,
}

impl Properties {
    /// Reads flags and properties. With the second, something was malformed, and the first is
    /// what came before that.
    pub(crate) fn read(raw: Bytes) -> (Self, Option<Malformed>) {
        let mut properties = Self::default();
        let malformed = properties.fill(&mut Reader::new(raw)).err();
        (properties, malformed)
    }

    fn fill(&mut self, reader: &mut Reader) -> Result<(), Malformed> {
        let flags = reader.u16()?;
        let mut last = flags;
        while last & MORE_FLAGS != 0 {
            last = reader.u16()?;
        }
        let has = |flag: u16| flags & flag != 0;
        let short = |reader: &mut Reader, flag| has(flag).then(|| reader.short()).transpose();
        self.content_type = short(reader, CONTENT_TYPE)?;
        self.content_encoding = short(reader, CONTENT_ENCODING)?;
        if has(HEADERS) {
            let mut table = reader.long()?;
            table.table_into(&mut self.headers, 0)?;
        }
        for one_byte in [DELIVERY_MODE, PRIORITY] {
            if has(one_byte) {
                reader.u8()?;
            }
        }
        self.correlation_id = short(reader, CORRELATION_ID)?;
        short(reader, REPLY_TO)?;
        short(reader, EXPIRATION)?;
        self.message_id = short(reader, MESSAGE_ID)?;
        if has(TIMESTAMP) {
            reader.u64()?;
        }
        self.kind = short(reader, TYPE)?;
        short(reader, USER_ID)?;
        self.app_id = short(reader, APP_ID)?;
        Ok(())
    }
}

/// Reads AMQP's primitives from bytes, without copying strings.
#[derive(Debug)]
pub(crate) struct Reader(Bytes);

impl Reader {
    /// From the beginning of `bytes`.
    pub(crate) fn new(bytes: Bytes) -> Self {
        Self(bytes)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Malformed> {
        self.0.try_get_u8().map_err(|_| Malformed)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Malformed> {
        self.0.try_get_u16().map_err(|_| Malformed)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        self.0.try_get_u32().map_err(|_| Malformed)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Malformed> {
        self.0.try_get_u64().map_err(|_| Malformed)
    }

    /// A short string's bytes.
    pub(crate) fn short(&mut self) -> Result<Bytes, Malformed> {
        let length = usize::from(self.u8()?);
        self.take(length)
    }

    /// A table's entries, read into `entries`.
    pub(crate) fn table(&mut self, entries: &mut Vec<(Bytes, Value)>) -> Result<(), Malformed> {
        self.long()?.table_into(entries, 0)
    }

    /// What is left.
    pub(crate) fn rest(self) -> Bytes {
        self.0
    }

    /// A reader of what a four-byte length is said to span.
    fn long(&mut self) -> Result<Self, Malformed> {
        let length = usize::try_from(self.u32()?).map_err(|_| Malformed)?;
        self.take(length).map(Self)
    }

    fn take(&mut self, length: usize) -> Result<Bytes, Malformed> {
        if length > self.0.len() {
            return Err(Malformed);
        }
        Ok(self.0.split_to(length))
    }

    fn table_into(
        &mut self,
        entries: &mut Vec<(Bytes, Value)>,
        depth: usize,
    ) -> Result<(), Malformed> {
        while !self.0.is_empty() {
            let name = self.short()?;
            entries.push((name, self.value(depth)?));
        }
        Ok(())
    }

    /// A value by its type's letter, as RabbitMQ uses them.
    fn value(&mut self, depth: usize) -> Result<Value, Malformed> {
        Ok(match self.u8()? {
            b'V' => Value::Void,
            b't' => Value::Bool(self.u8()? != 0),
            b'b' => Value::Integer(i64::from(self.u8()?.cast_signed())),
            b'B' => Value::Integer(i64::from(self.u8()?)),
            b's' | b'U' => Value::Integer(i64::from(self.u16()?.cast_signed())),
            b'u' => Value::Integer(i64::from(self.u16()?)),
            b'I' => Value::Integer(i64::from(self.u32()?.cast_signed())),
            b'i' => Value::Integer(i64::from(self.u32()?)),
            b'l' | b'L' => Value::Integer(self.u64()?.cast_signed()),
            b'f' => Value::Float(f32::from_bits(self.u32()?)),
            b'd' => Value::Double(f64::from_bits(self.u64()?)),
            b'D' => Value::Decimal { scale: self.u8()?, value: self.u32()? },
            b'S' | b'x' => Value::Bytes(self.long()?.rest()),
            b'T' => Value::Timestamp(self.u64()?),
            b'A' | b'F' if depth >= DEPTH_MAX => {
                self.long()?;
                Value::TooDeep
            }
            b'A' => {
                let (mut array, mut values) = (self.long()?, Vec::new());
                while !array.0.is_empty() {
                    values.push(array.value(depth + 1)?);
                }
                Value::Array(values)
            }
            b'F' => {
                let (mut table, mut entries) = (self.long()?, Vec::new());
                table.table_into(&mut entries, depth + 1)?;
                Value::Table(entries)
            }
            _ => return Err(Malformed),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn raw(flags: u16, rest: &[u8]) -> Bytes {
        let mut raw = flags.to_be_bytes().to_vec();
        raw.extend(rest);
        raw.into()
    }

    #[test]
    fn all_properties_are_in_their_place() {
        let mut rest = Vec::new();
        let short = |rest: &mut Vec<u8>, text: &[u8]| {
            rest.push(text.len() as u8);
            rest.extend(text);
        };
        short(&mut rest, b"text/plain");
        short(&mut rest, b"gzip");
        rest.extend([0, 0, 0, 4, 1, b'h', b't', 1]);
        rest.extend([2, 9]);
        for text in [&b"correlated"[..], b"reply", b"1000", b"id\xff"] {
            short(&mut rest, text);
        }
        rest.extend([0; 8]);
        for text in [&b"kind"[..], b"user", b"app", b"cluster"] {
            short(&mut rest, text);
        }
        let (properties, malformed) = Properties::read(raw(0xfffc, &rest));
        assert_eq!(malformed, None);
        let bytes = |text: &'static [u8]| Some(Bytes::from_static(text));
        assert_eq!(
            properties,
            Properties {
                content_type: bytes(b"text/plain"),
                content_encoding: bytes(b"gzip"),
                headers: vec![(Bytes::from_static(b"h"), Value::Bool(true))],
                correlation_id: bytes(b"correlated"),
                message_id: bytes(b"id\xff"),
                kind: bytes(b"kind"),
                app_id: bytes(b"app"),
            }
        );
    }

    #[test]
    fn names_repeat_in_order_and_are_bytes() {
        let table = [1, b'z', b'B', 1, 2, 0xff, 0xfe, b'V', 1, b'z', b'B', 2];
        let rest = [&[0, 0, 0, table.len() as u8][..], &table].concat();
        let (properties, malformed) = Properties::read(raw(HEADERS, &rest));
        assert_eq!(malformed, None);
        let names: Vec<_> = properties.headers.iter().map(|(name, _)| name.as_ref()).collect();
        assert_eq!(names, [&b"z"[..], &[0xff, 0xfe], b"z"]);
        assert_eq!(properties.headers[2].1, Value::Integer(2));
    }

    #[test]
    fn what_is_malformed_leaves_what_came_before() {
        let table = [1, b'a', b'B', 1, 1, b'b', b'?'];
        let rest = [&[1, b'c', 0, 0, 0, table.len() as u8][..], &table].concat();
        let (properties, malformed) = Properties::read(raw(CONTENT_TYPE | HEADERS, &rest));
        assert_eq!(malformed, Some(Malformed));
        assert_eq!(properties.content_type.as_deref(), Some(&b"c"[..]));
        assert_eq!(properties.headers, [(Bytes::from_static(b"a"), Value::Integer(1))]);
    }

    #[test]
    fn nesting_has_a_bound() {
        let mut value = vec![b'V'];
        for _ in 0..25_000 {
            let mut outer = vec![b'A'];
            outer.extend((value.len() as u32).to_be_bytes());
            outer.append(&mut value);
            value = outer;
        }
        let mut table = vec![1, b'h'];
        table.extend(value);
        let rest = [&(table.len() as u32).to_be_bytes()[..], &table].concat();
        let (properties, malformed) = Properties::read(raw(HEADERS, &rest));
        assert_eq!(malformed, None);
        let (mut depth, mut value) = (0, &properties.headers[0].1);
        while let Value::Array(inner) = value {
            (depth, value) = (depth + 1, &inner[0]);
        }
        assert_eq!((depth, value), (DEPTH_MAX, &Value::TooDeep));
    }

    proptest! {
        #[test]
        fn nothing_panics(raw in proptest::collection::vec(any::<u8>(), 0..200)) {
            Properties::read(raw.into());
        }
    }
}
