//! Memory spaces and addresses.
