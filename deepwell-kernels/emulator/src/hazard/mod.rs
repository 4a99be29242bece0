//! Who may see which bytes.
