//! The inboxd binary.

fn main() {}
