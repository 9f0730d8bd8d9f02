// Digests of pages as beats for a record writer: those that lie in one beat of memory go out together.
`default_nettype none
module digest_writer #(parameter LP = 12) (
    input  wire          clk,
    input  wire          rst,
    input  wire [60:0]   base,             // place of the first digest, in units of 8 bytes
    input  wire          in_valid,
    output wire          in_ready,
    input  wire [LP-1:0] in_place,
    input  wire [63:0]   in_digest,
    input  wire          flush,            // none comes any more
    output reg           out_valid,        // until it is taken
    input  wire          out_ready,
    output reg  [57:0]   out_address,      // in beats
    output reg  [511:0]  out_data,
    output wire [63:0]   out_strobe,
    output wire          idle
);
    reg [7:0] held;                        // digests of the beat
    wire [60:0] word = base + {{(61-LP){1'b0}}, in_place};
    wire fits = held == 0 || word[60:3] == out_address;
    assign in_ready = !out_valid && fits;
    assign idle = held == 0;
    genvar i;
    generate for (i = 0; i < 8; i = i + 1) begin : strobe
        assign out_strobe[8*i +: 8] = {8{held[i]}};
    end endgenerate
    always @(posedge clk) begin
        if (rst) begin
            held <= 0;
            out_valid <= 0;
        end else if (out_valid) begin
            if (out_ready) begin
                held <= 0;
                out_valid <= 0;
            end
        end else if (in_valid) begin
            if (fits) held[word[2:0]] <= 1;
            else out_valid <= 1;
        end else if (flush && held != 0) out_valid <= 1;
        if (in_valid && in_ready) begin
            out_address <= word[60:3];
            out_data[64*word[2:0] +: 64] <= in_digest;
        end
    end
endmodule
`default_nettype wire
