//! Sources of a model: a preset, a `config.json`, a model folder, or a `.pt2` archive.

mod model;
mod special_tokens;
mod tokenizer;
mod unread_weights;
mod weights_origin;

pub use self::model::{ModelSource, StoredParameter};
pub use self::special_tokens::SpecialTokens;
pub use self::tokenizer::{BYTES, ChosenTokenizer, open_tokenizer};
