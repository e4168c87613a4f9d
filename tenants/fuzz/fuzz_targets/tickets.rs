//! Any bytes give a ticket or an error, and a ticket has one form only.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tenants::ticket::{HEAD, Ticket};

fuzz_target!(|bytes: &[u8]| {
    // As it is, and behind today's magic and version: an input is tied to no version.
    for whole in [bytes, &[HEAD.as_slice(), bytes].concat()] {
        if let Ok(ticket) = Ticket::decode(whole) {
            assert_eq!(ticket.encode(), whole);
        }
    }
});
