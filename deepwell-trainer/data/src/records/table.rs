//! Records in Parquet.

use std::fs::File;
use std::path::Path;

use minijinja::Value;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row};
use parquet::schema::types::Type;

use super::super::DataError;
use super::Fields;

type Work<'a> = dyn FnMut(&Value, &str) -> Result<(), DataError> + 'a;

/// Reads the rows of the columns that may contain the text.
pub(super) fn rows(path: &Path, fields: &Fields, work: &mut Work<'_>) -> Result<(), DataError> {
    let broken = |place: &str, message: String| DataError::RecordSyntax {
        path: path.to_owned(),
        place: place.to_owned(),
        message,
    };
    let file =
        File::open(path).map_err(|source| DataError::Read { path: path.to_owned(), source })?;
    // The library panics on some damaged files.
    let reader = guarded(|| SerializedFileReader::new(file))
        .map_err(|message| broken("Parquet", message))?;
    let schema = reader.metadata().file_metadata().schema();
    let columns = schema.get_fields();
    let mut names = fields.names();
    names.push("tools");
    let wanted: Vec<_> =
        columns.iter().filter(|column| names.contains(&column.name())).cloned().collect();
    if !wanted.iter().any(|column| column.name() != "tools") {
        // The error lists the columns.
        let nulls = columns.iter().map(|column| (column.name(), Value::from(())));
        let object = Value::from_pairs(nulls);
        return fields.record(&object, "schema", path).map(|_| ());
    }
    let projection = Type::group_type_builder(schema.name())
        .with_fields(wanted)
        .build()
        .map_err(|error| broken("schema", error.to_string()))?;
    let mut rows = guarded(|| reader.get_row_iter(Some(projection)))
        .map_err(|message| broken("schema", message))?;
    for number in 1u64.. {
        let place = format!("row {number}");
        let row = guarded(|| rows.next().transpose()).map_err(|message| broken(&place, message))?;
        let Some(row) = row else { break };
        work(&object(&row), &place)?;
    }
    Ok(())
}

fn object(row: &Row) -> Value {
    Value::from_pairs(row.get_column_iter().map(|(name, field)| (name.as_str(), value(field))))
}

/// Converts a field to a value for a template or a text.
fn value(field: &Field) -> Value {
    match field {
        Field::Null => Value::from(()),
        Field::Str(text) => Value::from(text.as_str()),
        Field::Bytes(bytes) => match str::from_utf8(bytes.data()) {
            Ok(text) => Value::from(text),
            Err(_) => Value::from(()),
        },
        Field::Group(row) => object(row),
        Field::ListInternal(list) => list.elements().iter().map(value).collect(),
        Field::Bool(value) => Value::from(*value),
        Field::Int(number) => Value::from(*number),
        Field::Long(number) => Value::from(*number),
        Field::Float(number) => Value::from(*number),
        Field::Double(number) => Value::from(*number),
        // Numbers of other widths, times, decimals: messages do not contain them.
        other => Value::from(other.to_string()),
    }
}

fn guarded<T, E: std::fmt::Display>(run: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err("the library that reads Parquet has failed on it".to_owned()),
    }
}
