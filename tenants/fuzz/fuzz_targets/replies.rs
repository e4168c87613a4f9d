//! Any bytes in a frame give a reply or an error, and a reply survives being sent.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tenants::transport::Limits;
use tenants::transport::frame::{decode, decode_payload, encode};
use tenants::wire::Reply;

// What follows the header, so that no input is tied to a version of the protocol.
fuzz_target!(|payload: &[u8]| {
    if let Ok(message) = decode_payload::<Reply>(payload) {
        let frame = encode(&message, 0).expect("what was decoded can be encoded");
        let again = decode::<Reply>(&frame, Limits::ALL).expect("what was encoded can be decoded");
        assert_eq!(again, message);
    }
});
