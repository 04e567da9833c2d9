//! Small ONNX models, encoded by hand as protocol buffers. A field consists of its number and its
//! wire type, followed by its value. The field numbers are those of onnx.proto.

/// ONNX's numbers for datatypes.
pub mod element {
    pub const FLOAT: u64 = 1;
    pub const UINT8: u64 = 2;
    pub const INT8: u64 = 3;
    pub const UINT16: u64 = 4;
    pub const INT16: u64 = 5;
    pub const INT32: u64 = 6;
    pub const INT64: u64 = 7;
    pub const STRING: u64 = 8;
    pub const BOOL: u64 = 9;
    pub const FLOAT16: u64 = 10;
    pub const DOUBLE: u64 = 11;
    pub const UINT32: u64 = 12;
    pub const UINT64: u64 = 13;
    pub const BFLOAT16: u64 = 16;
    pub const FLOAT8: u64 = 17;
}

#[derive(Default, Clone)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn number(mut self, field: u64, value: u64) -> Self {
        self.varint(field << 3);
        self.varint(value);
        self
    }

    fn bytes(mut self, field: u64, value: &[u8]) -> Self {
        self.varint(field << 3 | 2);
        self.varint(value.len() as u64);
        self.0.extend_from_slice(value);
        self
    }

    fn message(self, field: u64, value: &Self) -> Self {
        self.bytes(field, &value.0)
    }
}

/// An operator: its type, the names of its inputs and the names of its outputs.
pub struct Node(pub &'static str, pub &'static [&'static str], pub &'static [&'static str]);

/// An input or output of a model.
#[derive(Clone)]
pub struct Value {
    name: &'static str,
    kind: Message,
}

impl Value {
    /// Returns a tensor. A negative length in `shape` makes the axis dynamic.
    pub fn tensor(name: &'static str, element: u64, shape: &[i64]) -> Self {
        Self { name, kind: Message::default().message(1, &tensor(element, shape)) }
    }

    /// Returns a tensor of unknown rank.
    pub fn of_any_rank(name: &'static str, element: u64) -> Self {
        Self { name, kind: Message::default().message(1, &Message::default().number(1, element)) }
    }

    /// Returns a sequence of tensors.
    pub fn sequence(name: &'static str, element: u64, shape: &[i64]) -> Self {
        let member = Message::default().message(1, &tensor(element, shape));
        Self { name, kind: Message::default().message(4, &Message::default().message(1, &member)) }
    }
}

fn tensor(element: u64, shape: &[i64]) -> Message {
    let axes = shape.iter().enumerate().map(|(index, &axis)| match u64::try_from(axis) {
        Ok(size) => Message::default().number(1, size),
        Err(_) => Message::default().bytes(2, format!("axis{index}").as_bytes()),
    });
    let shape = axes.fold(Message::default(), |shape, axis| shape.message(1, &axis));
    Message::default().number(1, element).message(2, &shape)
}

/// Returns an encoded FP32 constant.
pub fn weights(name: &str, shape: &[u64], values: &[f32]) -> Vec<u8> {
    let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>();
    let dims = shape.iter().fold(Message::default(), |dims, &axis| dims.number(1, axis));
    dims.number(2, element::FLOAT).bytes(8, name.as_bytes()).bytes(9, &bytes).0
}

pub fn model(nodes: &[Node], constants: &[Vec<u8>], inputs: &[Value], outputs: &[Value]) -> Vec<u8> {
    let mut graph = Message::default();
    for Node(kind, inputs, outputs) in nodes {
        let node = inputs.iter().fold(Message::default(), |node, name| node.bytes(1, name.as_bytes()));
        let node = outputs.iter().fold(node, |node, name| node.bytes(2, name.as_bytes()));
        graph = graph.message(1, &node.bytes(4, kind.as_bytes()));
    }
    graph = graph.bytes(2, b"graph");
    graph = constants.iter().fold(graph, |graph, constant| graph.bytes(5, constant));
    for (field, values) in [(11, inputs), (12, outputs)] {
        for Value { name, kind } in values {
            graph = graph.message(field, &Message::default().bytes(1, name.as_bytes()).message(2, kind));
        }
    }
    let operators = Message::default().bytes(1, b"").number(2, 19);
    Message::default().number(1, 9).message(7, &graph).message(8, &operators).0
}
