//! Any bytes give a ticket or an error, and a ticket has one form only.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tenants::ticket::Ticket;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(ticket) = Ticket::decode(bytes) {
        assert_eq!(ticket.encode().as_deref(), Some(bytes));
    }
});
