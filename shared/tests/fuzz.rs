//! Fuzz tests of the messages between the supervisor and a worker, and of models' files. The decoders
//! must return a message or an error for any bytes. `cargo bolero test NAME` runs one test until you stop it.

use std::io::Cursor;

use prost::Message;
use shadowslice_shared::batch::{self, Command, WorkerMessage};
use shadowslice_shared::boot::{BootCommand, BootReply};
use shadowslice_shared::frame;
use shadowslice_shared::onnx::{self, ModelHeader, ModelProto};

#[test]
fn boot() {
    bolero::check!().for_each(|bytes: &[u8]| {
        frame::decode::<BootReply>(bytes).ok();
        frame::decode::<BootCommand>(bytes).ok();
        frame::receive::<BootReply>(bytes).ok();
    });
}

#[test]
fn batches() {
    bolero::check!().for_each(|bytes: &[u8]| {
        if let Ok(command) = batch::decode::<Command>(bytes) {
            let mut message = vec![0; batch::MAX_MESSAGE_BYTES];
            let again = batch::encode(&command, &mut message).map(|bytes| batch::decode(bytes).ok());
            assert!(
                again.is_ok_and(|again| again == Some(command)),
                "a decoded message can be encoded again"
            );
        }
        batch::decode::<WorkerMessage>(bytes).ok();
    });
}

#[test]
fn models() {
    bolero::check!().for_each(|bytes: &[u8]| {
        let header = onnx::decode::<ModelHeader>(Cursor::new(bytes), u64::MAX);
        let model = onnx::decode::<ModelProto>(Cursor::new(bytes), u64::MAX);
        assert_eq!(header.ok(), ModelHeader::decode(bytes).ok(), "the file is decoded like its bytes");
        assert_eq!(model.ok(), ModelProto::decode(bytes).ok());
    });
}
