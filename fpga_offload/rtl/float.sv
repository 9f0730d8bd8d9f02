// Arithmetic of the attention engine: storage formats in, fp32 inside.
`default_nettype none

// A stored number, fp16 or bf16, as sign, exponent of 8 bits (bias 127) and fraction of 10: exact for
// both, subnormals of fp16 included. Subnormals of bf16, below 2^-126, become 0. Combinational.
module stored_to_wide (
    input  wire        bf16,
    input  wire [15:0] x,
    output wire [18:0] y
);
    wire [4:0] half_exponent = x[14:10];
    wire [9:0] half_fraction = x[9:0];
    reg  [3:0] zeros;
    always @* begin
        casez (half_fraction)
            10'b1?????????: zeros = 0;
            10'b01????????: zeros = 1;
            10'b001???????: zeros = 2;
            10'b0001??????: zeros = 3;
            10'b00001?????: zeros = 4;
            10'b000001????: zeros = 5;
            10'b0000001???: zeros = 6;
            10'b00000001??: zeros = 7;
            10'b000000001?: zeros = 8;
            default: zeros = 9;
        endcase
    end
    wire        subnormal = half_exponent == 0;
    wire [9:0]  shifted = half_fraction << (zeros + 4'd1);
    wire [7:0]  exponent = subnormal ? (half_fraction == 0 ? 8'd0 : 8'd112 - {4'd0, zeros})
                         : &half_exponent ? 8'd255 : {3'd0, half_exponent} + 8'd112;
    assign y = bf16 ? {x[15], x[14:7], x[6:0], 3'd0}
                    : {x[15], exponent, subnormal ? shifted : half_fraction};
endmodule

// Product of two wide numbers as fp32, exact up to its range. Latency 3.
module mul_wide_wide (
    input  wire        clk,
    input  wire [18:0] a,
    input  wire [18:0] b,
    output reg  [31:0] y
); /*verilator no_inline_module*/
    reg [18:0] a1, b1;
    reg [21:0] mantissa;
    reg signed [9:0] exponent;
    reg sign, zero, inf;
    wire signed [9:0] rounded = exponent + (mantissa[21] ? 10'sd1 : 10'sd0);
    always @(posedge clk) begin
        a1 <= a;
        b1 <= b;
        mantissa <= {1'b1, a1[9:0]} * {1'b1, b1[9:0]};
        exponent <= $signed({2'd0, a1[17:10]}) + $signed({2'd0, b1[17:10]}) - 10'sd127;
        sign <= a1[18] ^ b1[18];
        zero <= a1[17:10] == 0 || b1[17:10] == 0;
        inf <= &a1[17:10] || &b1[17:10];
        if (zero || rounded <= 0) y <= 32'd0;
        else if (inf || rounded >= 255) y <= {sign, 8'hff, 23'd0};
        else y <= {sign, rounded[7:0], mantissa[21] ? {mantissa[20:0], 2'd0} : {mantissa[19:0], 3'd0}};
    end
endmodule

// Product of an fp32 number and a wide number as fp32, to nearest even. Latency 4, one DSP (24 x 11).
module mul_single_wide (
    input  wire        clk,
    input  wire [31:0] p,
    input  wire [18:0] v,
    output reg  [31:0] y
); /*verilator no_inline_module*/
    reg [31:0] p1;
    reg [18:0] v1;
    reg [34:0] mantissa2;
    reg signed [9:0] exponent2, exponent3;
    reg sign2, zero2, inf2, sign3, zero3, inf3;
    reg [24:0] rounded;
    wire [34:0] normal = mantissa2[34] ? mantissa2 : {mantissa2[33:0], 1'b0};
    wire up = normal[10] & ((|normal[9:0]) | normal[11]);
    wire signed [9:0] last = exponent3 + (rounded[24] ? 10'sd1 : 10'sd0);
    always @(posedge clk) begin
        p1 <= p;
        v1 <= v;
        mantissa2 <= {1'b1, p1[22:0]} * {1'b1, v1[9:0]};
        exponent2 <= $signed({2'd0, p1[30:23]}) + $signed({2'd0, v1[17:10]}) - 10'sd127;
        sign2 <= p1[31] ^ v1[18];
        zero2 <= p1[30:23] == 0 || v1[17:10] == 0;
        inf2 <= &p1[30:23] || &v1[17:10];
        rounded <= {1'b0, normal[34:11]} + {24'd0, up};
        exponent3 <= exponent2 + (mantissa2[34] ? 10'sd1 : 10'sd0);
        sign3 <= sign2;
        zero3 <= zero2;
        inf3 <= inf2;
        if (zero3 || last <= 0) y <= 32'd0;
        else if (inf3 || last >= 255) y <= {sign3, 8'hff, 23'd0};
        else y <= {sign3, last[7:0], rounded[24] ? rounded[23:1] : rounded[22:0]};
    end
endmodule

// Sum of two fp32 numbers. Latency 7.
module add_single (
    input  wire        clk,
    input  wire        rst,
    input  wire        in_valid,
    input  wire [31:0] a,
    input  wire [31:0] b,
    output wire        out_valid,
    output wire [31:0] y
); /*verilator no_inline_module*/
    zkf_add #(.WEXP(8), .WMAN(24), .STAGE_ALIGN(1), .STAGE_NORMALIZE(1), .STAGE_OUTPUT(1), .LATENCY(7))
        adder(.clk(clk), .rst(rst), .in_valid(in_valid), .a(a), .b(b), .out_valid(out_valid), .y(y));
endmodule

// Sum of N numbers of one cycle, N a power of two. Latency 7 log2 N.
module add_tree #(parameter N = 32) (
    input  wire            clk,
    input  wire            rst,
    input  wire            in_valid,
    input  wire [32*N-1:0] x,
    output wire            out_valid,
    output wire [31:0]     y
);
    generate
        if (N == 1) begin : leaf
            assign out_valid = in_valid;
            assign y = x;
        end else begin : node
            wire [32*(N/2)-1:0] sums;
            wire [N/2-1:0] valid;
            genvar i;
            for (i = 0; i < N/2; i = i + 1) begin : pair
                add_single add(.clk(clk), .rst(rst), .in_valid(in_valid), .a(x[64*i +: 32]),
                    .b(x[64*i+32 +: 32]), .out_valid(valid[i]), .y(sums[32*i +: 32]));
            end
            add_tree #(.N(N/2)) half(.clk(clk), .rst(rst), .in_valid(valid[0]), .x(sums),
                .out_valid(out_valid), .y(y));
        end
    endgenerate
endmodule

// Sums of N valid inputs that follow each other, N a power of two.
module add_sequence #(parameter N = 4) (
    input  wire        clk,
    input  wire        rst,
    input  wire        in_valid,
    input  wire [31:0] x,
    output wire        out_valid,
    output wire [31:0] y
);
    generate
        if (N == 1) begin : leaf
            assign out_valid = in_valid;
            assign y = x;
        end else begin : node
            reg odd;
            reg [31:0] held;
            wire valid;
            wire [31:0] sum;
            always @(posedge clk)
                if (rst) odd <= 0;
                else if (in_valid) begin
                    odd <= !odd;
                    if (!odd) held <= x;
                end
            add_single add(.clk(clk), .rst(rst), .in_valid(in_valid && odd), .a(held), .b(x),
                .out_valid(valid), .y(sum));
            add_sequence #(.N(N/2)) half(.clk(clk), .rst(rst), .in_valid(valid), .x(sum),
                .out_valid(out_valid), .y(y));
        end
    endgenerate
endmodule

// The least integer that is not below x, as fp32; of numbers from 2^23 on, x. Combinational.
module ceil_single (
    input  wire [31:0] x,
    output wire [31:0] y
);
    wire [7:0]  e = x[30:23];
    wire [4:0]  fraction_bits = 5'd23 - (e[4:0] - 5'd31);        // of 127 <= e < 150: 23 - (e - 127)
    wire [30:0] unit = 31'd1 << fraction_bits;
    wire [30:0] whole = x[30:0] & ~(unit - 31'd1);
    wire        exact = whole == x[30:0];
    assign y = e == 0 ? 32'd0
             : e < 127 ? (x[31] ? 32'd0 : 32'h3f800000)
             : e >= 150 ? x
             : {x[31], (exact || x[31]) ? whole : whole + unit};
endmodule

// One accumulator: eight running sums that circulate in the adder, one a cycle. A sum can be scaled by
// 2^-shift, and sums that stand four (`fold4`) or two (`fold2`) apart can be added to each other.
module accumulator (
    input  wire        clk,
    input  wire        rst,
    input  wire        clear,
    input  wire        scale,
    input  wire [8:0]  shift,
    input  wire        fold4,
    input  wire        fold2,
    input  wire [31:0] add,
    output wire [31:0] sum
); /*verilator no_inline_module*/
    reg [31:0] back, term, past1, past2, past3, past4;
    wire unused;
    wire signed [9:0] scaled = $signed({2'd0, sum[30:23]}) - $signed({1'b0, shift});
    always @(posedge clk) begin
        back <= clear ? 32'd0 : !scale ? sum
              : (sum[30:23] == 0 || scaled <= 0) ? 32'd0 : {sum[31], scaled[7:0], sum[22:0]};
        term <= fold4 ? past4 : fold2 ? past2 : add;
        past1 <= sum;
        past2 <= past1;
        past3 <= past2;
        past4 <= past3;
    end
    add_single adder(.clk(clk), .rst(rst), .in_valid(1'b1), .a(back), .b(term), .out_valid(unused), .y(sum));
endmodule
`default_nettype wire
