//! A model in the manner of GPT-2 (layer normalization and biases, GELU in both forms), without
//! attention, built by hand.

use deepwell_ir::{Graph, GraphBuilder, Init, IrError, Role, Shape, Tag, TensorId, ops};

/// Width of the residual stream.
pub(crate) const WIDTH: usize = 64;
/// Token ids lie below.
pub(crate) const VOCABULARY: usize = 96;

/// Large enough that no gradient is lost in rounding.
const INIT: Init = Init::Normal { std: 0.3 };

fn linear(
    b: &mut GraphBuilder,
    name: &str,
    x: TensorId,
    [outputs, inputs]: [usize; 2],
) -> Result<TensorId, IrError> {
    let weight = format!("{name}_proj.weight");
    let weight = b.parameter(&weight, Shape::new([outputs, inputs]), INIT, Role::Linear);
    let bias = b.parameter(&format!("{name}_proj.bias"), Shape::new([outputs]), INIT, Role::Linear);
    Ok(b.op(name, ops::Linear { bias: true }, &[x, weight, bias])?[0])
}

fn norm(b: &mut GraphBuilder, name: &str, x: TensorId) -> Result<TensorId, IrError> {
    let weight = b.parameter(&format!("{name}.weight"), Shape::new([WIDTH]), INIT, Role::Norm);
    let bias = b.parameter(&format!("{name}.bias"), Shape::new([WIDTH]), INIT, Role::Norm);
    Ok(b.op(name, ops::LayerNorm { eps: 1e-5 }, &[x, weight, bias])?[0])
}

/// Embedding, two feed-forward blocks with residual adds, final norm, head.
pub(crate) fn gpt() -> Result<Graph, IrError> {
    let mut b = GraphBuilder::new("gpt");
    let tokens = b.tokens();
    let targets = b.targets();
    let scale = b.loss_scale();
    let sizes = Shape::new([VOCABULARY, WIDTH]);
    let table = b.parameter("table", sizes.clone(), INIT, Role::Embedding);
    let mut x = b.op("embed", ops::Embedding::default(), &[tokens, table])?[0];
    for layer in 0..2 {
        b.scope(Tag::Mlp, Some(layer));
        let name = |part: &str| format!("layers.{layer}.{part}");
        let h = norm(&mut b, &name("norm"), x)?;
        let h = linear(&mut b, &name("up"), h, [2 * WIDTH, WIDTH])?;
        let h = b.op(&name("gelu"), ops::Gelu { tanh: layer == 0 }, &[h])?[0];
        let h = linear(&mut b, &name("down"), h, [WIDTH, 2 * WIDTH])?;
        x = b.op(&name("residual"), ops::Add {}, &[x, h])?[0];
    }
    b.scope(Tag::Norm, None);
    let x = norm(&mut b, "norm", x)?;
    b.scope(Tag::Head, None);
    let head = b.parameter("head", sizes, INIT, Role::Head);
    b.op("loss", ops::LinearCrossEntropy {}, &[x, head, targets, scale])?;
    b.finish()
}
