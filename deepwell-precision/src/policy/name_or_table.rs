//! A value of a file, given as a table or by name.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::UnknownName;

/// Reads a `T` from its table, or from a name by `from_name`. Unlike serde's untagged enums this
/// keeps the position and the reason of errors within a table.
pub(super) fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
    from_name: impl FnOnce(&str) -> Result<T, UnknownName>,
) -> Result<T, D::Error> {
    deserializer.deserialize_any(NameOrTable { from_name, table: PhantomData })
}

struct NameOrTable<F, T> {
    from_name: F,
    table: PhantomData<T>,
}

impl<'de, F, T> Visitor<'de> for NameOrTable<F, T>
where
    F: FnOnce(&str) -> Result<T, UnknownName>,
    T: Deserialize<'de>,
{
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a format or a table")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<T, E> {
        (self.from_name)(name).map_err(E::custom)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
        T::deserialize(MapAccessDeserializer::new(map))
    }
}
